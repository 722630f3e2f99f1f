"""`fedssl embed`, `search`, `duplicates` and `outliers`: representations of images, and what they are good for."""
