"""Sign-in for people by OpenID Connect: the provider, its ID tokens, and roles from their claims."""
