"""The worker: trains for one data owner and sends only what the method permits."""
