"""The HTTP server and its middlewares: body limits, rate limits, timeouts and graceful shutdown."""
