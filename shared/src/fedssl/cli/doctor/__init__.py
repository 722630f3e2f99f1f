"""`fedssl doctor`: checks of this machine and of the coordinator."""
