"""The HTTP server and its middlewares: limits of body, rate and time, and an orderly shutdown."""
