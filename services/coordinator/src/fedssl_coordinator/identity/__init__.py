"""Identity: authentication, tokens, and the rows of clients."""
