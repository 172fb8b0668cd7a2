"""Programs that measure the engine; each prints a table and then one JSON line."""
