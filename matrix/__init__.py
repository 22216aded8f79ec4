"""Tests of the package in each supported release of Airflow, with that release's pinned packages: `make matrix`."""
