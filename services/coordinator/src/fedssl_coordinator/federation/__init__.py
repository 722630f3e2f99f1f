"""The federation itself: runs, rounds, work, clients, jobs and their state machines."""
