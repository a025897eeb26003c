"""What is not mathematics: memory, which path ran, devices, torch's private names, caches."""
