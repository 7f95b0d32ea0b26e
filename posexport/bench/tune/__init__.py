"""The tune stage. It starts in `posexport.bench.tune.search`."""
