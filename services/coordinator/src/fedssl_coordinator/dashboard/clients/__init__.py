"""The list of clients, and the page of one."""
