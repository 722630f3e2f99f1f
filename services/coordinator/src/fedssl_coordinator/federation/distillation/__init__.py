"""Distillation jobs: what the coordinator trains itself, between a round's updates and the next broadcast (FLESD)."""
