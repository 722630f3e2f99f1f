"""The requests of workers: register, claim, submit, decline."""
