"""The form that starts a run."""
