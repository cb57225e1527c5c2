"""Attacks on representations: what a trained model's layers give away about who was in its training data."""

from lmdp.audit.instrument import audit, audit_embeddings
from lmdp.audit.results import AuditReport, Leak, Peak

__all__ = ["AuditReport", "Leak", "Peak", "audit", "audit_embeddings"]
