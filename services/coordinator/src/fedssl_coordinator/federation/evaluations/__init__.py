"""Evaluations: a round's encoder judged on labelled images, beside the run and never in its way."""
