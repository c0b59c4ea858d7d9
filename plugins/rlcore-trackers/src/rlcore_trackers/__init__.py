"""Trackers that send metrics, samples and histograms to MLflow, SwanLab and Trackio."""
