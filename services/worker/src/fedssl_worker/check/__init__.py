"""`fedssl-worker check`: checks of a site before it joins. They send none of their results."""
