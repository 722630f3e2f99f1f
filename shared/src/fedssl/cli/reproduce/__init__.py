"""`fedssl reproduce`: the tables of the papers."""
