"""`fedssl-worker check`: checks of a site before it joins, which send none of their results."""
