"""Jobs: what distillation jobs and evaluations have in common, from the queue to their end."""
