"""`fedssl evaluate`: measure how good an encoder is."""
