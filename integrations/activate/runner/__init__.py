"""Run a workflow of the ACTIVATE platform without the platform: real steps on real hosts, with fakes for the platform's actions.

python -m runner workflow.yaml --inputs inputs.json
"""
