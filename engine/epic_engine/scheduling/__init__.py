"""Many requests on one model: queues, passes, and the thread that runs them."""
