"""What several test packages share."""
