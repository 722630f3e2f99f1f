"""Evaluations at the sites: a round's encoder, evaluated by each client on its own labelled images."""
