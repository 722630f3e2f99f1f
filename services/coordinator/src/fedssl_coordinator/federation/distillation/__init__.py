"""Distillation jobs: trainings on the coordinator between a round's updates and the next broadcast (FLESD)."""
