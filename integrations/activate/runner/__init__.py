"""Runs a workflow of the ACTIVATE platform here, without the platform: real steps on real hosts, the platform's actions stood in for.

python -m runner workflow.yaml --inputs inputs.json
"""
