"""The reducers: how the coordinator combines what the clients send."""
