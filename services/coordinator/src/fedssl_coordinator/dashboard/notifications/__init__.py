"""The page of the destinations that are notified of events."""
