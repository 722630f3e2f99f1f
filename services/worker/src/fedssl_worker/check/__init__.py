"""`fedssl-worker check`: checks of a site before it joins. Nothing of it leaves this machine."""
