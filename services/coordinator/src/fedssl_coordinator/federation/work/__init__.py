"""What workers do: register, claim, submit, decline."""
