"""Methods, composed of an objective, add-ons, a merge rule and a reducer."""
