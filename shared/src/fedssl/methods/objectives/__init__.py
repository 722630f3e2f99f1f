"""The objectives, one per file: the loss that a method minimises on a client."""
