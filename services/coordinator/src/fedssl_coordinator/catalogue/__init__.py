"""The methods that this build knows, for people and forms."""
