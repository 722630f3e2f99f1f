"""Bearer tokens: made, listed, revoked."""
