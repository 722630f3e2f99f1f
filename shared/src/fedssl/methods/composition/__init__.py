"""What composes an objective, add-ons, a merge rule and a reducer into a method."""
