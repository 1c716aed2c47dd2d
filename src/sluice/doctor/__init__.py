"""Why a latency percentile moved: causes with their shares and evidence, from the journal."""
