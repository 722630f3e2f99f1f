"""The Celery processes: tasks, and the computing halves of rounds, distillation and evaluations.

Only this package imports torch.
"""
