"""Bearer tokens: creating, listing, revoking and enrolling."""
