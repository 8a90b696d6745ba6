"""What a run shows and keeps: metrics, timing, trackers, samples, the run folder."""
