"""What is kept in the artifact store, for how long, and whether it is all there."""
