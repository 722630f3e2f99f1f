"""Training the clients of a simulation in several processes.

A process is started by its command line and gets its images, weights and states through shared memory, and messages as
JSON: nothing is pickled.
"""
