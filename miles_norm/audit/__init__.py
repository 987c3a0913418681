"""Audits: what normalization does to a run, and what is wrong with its dumps."""

from miles_norm.audit.baselines import BASELINES, baseline_advantages
from miles_norm.audit.findings import Finding
from miles_norm.audit.metrics import audit_metrics
from miles_norm.audit.report import write_report
from miles_norm.audit.run import Audit, AuditedStep, audit_dumps, audit_rows

__all__ = [
    "BASELINES",
    "Audit",
    "AuditedStep",
    "Finding",
    "audit_dumps",
    "audit_metrics",
    "audit_rows",
    "baseline_advantages",
    "write_report",
]
