"""Who is calling: authentication, tokens and the rows of registered clients."""
