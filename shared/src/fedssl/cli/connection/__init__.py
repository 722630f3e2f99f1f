"""Which coordinator a command connects to, and `fedssl connection`, which names coordinators."""
