"""Properties of everything that reads files: whatever is in them, errors are ours, memory and time are bounded.

Each is a function of hypothesis' ``data()``; :data:`~tests.fuzz.running.PROPERTIES` has them by name. Few examples of
each run with the other tests, ``python -m tests.soak.fuzz`` runs as many as there is time for.
"""
