"""The append-only audit log, as pages and as a stream."""
