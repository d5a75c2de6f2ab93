"""How a policy reaches the fleet: the vocabulary, version files, stores, the publisher and the watcher."""
