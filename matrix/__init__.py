"""The releases of Airflow that the package supports, each under its own pins: `make matrix`."""
