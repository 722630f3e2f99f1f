"""Notifications of events by signed webhooks and by e-mail."""
