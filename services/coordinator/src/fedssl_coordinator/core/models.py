"""The tables. Postgres is the source of truth: constraints make invalid states impossible, not only Python code."""

from datetime import datetime
from typing import Any, ClassVar, cast
from uuid import UUID, uuid4

from sqlalchemy import (
    ARRAY,
    BigInteger,
    CheckConstraint,
    DateTime,
    ForeignKey,
    Identity,
    Index,
    MetaData,
    SmallInteger,
    Table,
    Text,
    UniqueConstraint,
    func,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from fedssl.protocol.notifications import DeliveryState, DestinationKind
from fedssl.protocol.states import (
    AssignmentState,
    Cause,
    JobState,
    Outcome,
    RoundState,
    RunState,
    SiteEvaluationState,
    Verdict,
)
from fedssl.protocol.tokens import Role

Json = dict[str, Any]


class Base(DeclarativeBase):
    """The base of all tables: text columns without a length, times with a zone, constraints with predictable names."""

    type_annotation_map = {str: Text, datetime: DateTime(timezone=True), Json: JSONB(none_as_null=True)}
    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_name)s",
            "pk": "pk_%(table_name)s",
        }
    )


def table_of(model: type[Base]) -> Table:
    """Return a class's table. Statements on tables, built once, take a third of the time of those on classes."""
    return cast("Table", model.__table__)


def _one_of(column: str, states: type) -> CheckConstraint:
    values = ", ".join(f"'{state.value}'" for state in states)  # type: ignore[attr-defined]
    return CheckConstraint(f"{column} IN ({values})", name=f"{column}_known")


class Project(Base):
    """A group of people with its runs, clients and data sets. Tokens may be restricted to one."""

    __tablename__ = "projects"

    name: Mapped[str] = mapped_column(primary_key=True)
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())


def _project() -> Any:
    """Return the column of what belongs to one project. What exists without projects belongs to `default`."""
    return mapped_column(ForeignKey("projects.name"), server_default=text("'default'"))


class Client(Base):
    __tablename__ = "clients"

    id: Mapped[str] = mapped_column(primary_key=True)
    project: Mapped[str] = _project()
    # The operators' name for it. Nothing depends on it.
    display_name: Mapped[str] = mapped_column(server_default=text("''"))
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    registered_at: Mapped[datetime | None]
    last_seen_at: Mapped[datetime | None]
    revoked_at: Mapped[datetime | None]
    device: Mapped[str | None]
    num_images: Mapped[int | None] = mapped_column(BigInteger)
    channels: Mapped[int | None]
    image_size: Mapped[int | None]
    # The shapes that the worker can prepare. Null: only the one above.
    serves: Mapped[Json | None]
    worker_version: Mapped[str | None]
    methods: Mapped[Json | None]
    encoder: Mapped[Json | None]
    policy: Mapped[Json | None]
    # What `fedssl-worker check` has measured there, if the data owner reports it.
    check: Mapped[Json | None]
    # The Ed25519 key that other workers know it by in secure rounds, and the one that its worker announced last. If
    # they differ, it takes part in no secure round until an administrator confirms the new key.
    identity: Mapped[str | None]
    announced_identity: Mapped[str | None]


class DataReport(Base):
    """The last report of a client's worker about its images."""

    __tablename__ = "data_reports"

    client_id: Mapped[str] = mapped_column(ForeignKey("clients.id"), primary_key=True)
    report: Mapped[Json]
    reported_at: Mapped[datetime] = mapped_column(server_default=func.now())


class Token(Base):
    __tablename__ = "tokens"
    __table_args__ = (
        _one_of("role", Role),
        CheckConstraint("(role IN ('worker', 'enrolment')) = (client_id IS NOT NULL)", name="worker_has_client"),
        CheckConstraint("role <> 'enrolment' OR expires_at IS NOT NULL", name="enrolment_expires"),
        CheckConstraint("role = 'enrolment' OR used_at IS NULL", name="enrolment_is_used"),
        CheckConstraint("role = 'worker' OR enrolment_id IS NULL", name="worker_is_enrolled"),
        CheckConstraint("project IS NULL OR client_id IS NULL", name="worker_has_its_clients_project"),
        CheckConstraint("memberships IS NULL OR (project IS NOT NULL AND subject IS NOT NULL)", name="member_signs_in"),
        CheckConstraint("subject IS NULL OR (client_id IS NULL AND expires_at IS NOT NULL)", name="sign_in_expires"),
        Index(
            "uq_tokens_one_open_enrolment",
            "client_id",
            unique=True,
            postgresql_where=text("role = 'enrolment' AND used_at IS NULL AND revoked_at IS NULL"),
        ),
    )

    id: Mapped[UUID] = mapped_column(primary_key=True, default=uuid4)
    role: Mapped[str]
    # The project to which the owner is restricted. Null: every project; a worker's is that of its client.
    project: Mapped[str | None] = mapped_column(ForeignKey("projects.name"))
    # The role of a person who has signed in, per project: those among which the person can choose.
    memberships: Mapped[Json | None]
    client_id: Mapped[str | None] = mapped_column(ForeignKey("clients.id"))
    label: Mapped[str]
    secret_hash: Mapped[str] = mapped_column(unique=True)
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    expires_at: Mapped[datetime | None]
    revoked_at: Mapped[datetime | None]
    # When an enrolment was exchanged for the worker's token that refers to it. Unique, so it can be used once.
    used_at: Mapped[datetime | None]
    enrolment_id: Mapped[UUID | None] = mapped_column(ForeignKey("tokens.id"), unique=True)
    # Whose sign-in at an OpenID Connect provider this is. No one knows the secret: only a browser's session uses it.
    subject: Mapped[str | None] = mapped_column(index=True)


class Run(Base):
    __tablename__ = "runs"
    __table_args__ = (
        _one_of("state", RunState),
        _one_of("outcome", Outcome),
        CheckConstraint("(state = 'finished') = (outcome IS NOT NULL)", name="outcome_when_finished"),
        CheckConstraint("rounds_closed BETWEEN 0 AND num_rounds", name="rounds_closed_in_range"),
        Index("ix_runs_created_at_id", "created_at", "id"),
    )

    id: Mapped[UUID] = mapped_column(primary_key=True, default=uuid4)
    project: Mapped[str] = _project()
    name: Mapped[str]
    method: Mapped[str]
    method_version: Mapped[int]
    state: Mapped[str]
    outcome: Mapped[str | None]
    reason: Mapped[str | None]
    spec: Mapped[Json]
    plan: Mapped[Json | None]
    num_rounds: Mapped[int]
    rounds_closed: Mapped[int] = mapped_column(server_default=text("0"))
    # A model is what is evaluated and exported. Null: the broadcast, if that holds the same tensors.
    initial_model: Mapped[str | None] = mapped_column(ForeignKey("artifacts.digest"))
    model: Mapped[str | None] = mapped_column(ForeignKey("artifacts.digest"))
    # The encoder's tensors that no round changes, which each client fetches once. Null: there are none.
    frozen: Mapped[str | None] = mapped_column(ForeignKey("artifacts.digest"))
    initial_broadcast: Mapped[str | None] = mapped_column(ForeignKey("artifacts.digest"))
    server_state: Mapped[str | None] = mapped_column(ForeignKey("artifacts.digest"))
    broadcast: Mapped[str | None] = mapped_column(ForeignKey("artifacts.digest"))
    # The weights of the spec's model.initial, which stay stored for as long as the run exists.
    initial_weights: Mapped[str | None] = mapped_column(ForeignKey("artifacts.digest"))
    # Begins with the project's name and a space, unless that is `default`: a key is unique in its project.
    idempotency_key: Mapped[str | None] = mapped_column(unique=True)
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    started_at: Mapped[datetime | None]
    finished_at: Mapped[datetime | None]
    # How often the computation that is due (first weights or an aggregation) was started, and when to retry it.
    num_tries: Mapped[int] = mapped_column(server_default=text("0"))
    retry_at: Mapped[datetime | None]
    # How many of the last tries ended their process before they could record an error.
    num_deaths: Mapped[int] = mapped_column(server_default=text("0"))
    # The last round that was aggregated without the state of a client whose loss makes all clients start cold.
    restart_round: Mapped[int | None]
    # The operators' name, tags and notes. Nothing depends on them.
    tags: Mapped[list[str]] = mapped_column(JSONB(none_as_null=True), server_default=text("'[]'"))
    notes: Mapped[str] = mapped_column(server_default=text("''"))


class Round(Base):
    __tablename__ = "rounds"
    __table_args__ = (
        UniqueConstraint("run_id", "number"),
        _one_of("state", RoundState),
        _one_of("verdict", Verdict),
        CheckConstraint("(state = 'closed') = (verdict IS NOT NULL)", name="verdict_when_closed"),
        Index("uq_rounds_one_unclosed", "run_id", unique=True, postgresql_where=text("state <> 'closed'")),
        Index("ix_rounds_broadcast", "broadcast"),
        Index("ix_rounds_model", "model", postgresql_where=text("model IS NOT NULL")),
    )

    id: Mapped[UUID] = mapped_column(primary_key=True, default=uuid4)
    run_id: Mapped[UUID] = mapped_column(ForeignKey("runs.id"))
    number: Mapped[int]
    attempt: Mapped[int] = mapped_column(server_default=text("1"))
    state: Mapped[str]
    verdict: Mapped[str | None]
    reason: Mapped[str | None]
    broadcast: Mapped[str] = mapped_column(ForeignKey("artifacts.digest"))
    # The run's model while the round is open. Null: the broadcast.
    model: Mapped[str | None] = mapped_column(ForeignKey("artifacts.digest"))
    # How many updates close the round if its cohort is larger than needed. None if all of the cohort's are wanted.
    num_wanted: Mapped[int | None]
    opened_at: Mapped[datetime] = mapped_column(server_default=func.now())
    deadline: Mapped[datetime]
    closed_at: Mapped[datetime | None]


_LIVE = "state IN ('offered', 'leased', 'submitted')"


class Assignment(Base):
    __tablename__ = "assignments"
    __table_args__ = (
        _one_of("state", AssignmentState),
        _one_of("cause", Cause),
        UniqueConstraint("round_id", "client_id", "attempt"),
        CheckConstraint("state <> 'accepted' OR update_digest IS NOT NULL", name="accepted_has_update"),
        CheckConstraint("state <> 'leased' OR lease_expires_at IS NOT NULL", name="leased_has_end"),
        Index("uq_assignments_one_accepted", "round_id", "client_id", unique=True,
              postgresql_where=text("state = 'accepted'")),
        Index("uq_assignments_one_live", "round_id", "client_id", unique=True, postgresql_where=text(_LIVE)),
        Index("ix_assignments_claimable", "client_id", "offered_at", postgresql_where=text(_LIVE)),
        Index("ix_assignments_run_client", "run_id", "client_id", "round_number"),
        Index("ix_assignments_update_digest", "update_digest"),
    )  # fmt: skip

    id: Mapped[UUID] = mapped_column(primary_key=True, default=uuid4)
    run_id: Mapped[UUID] = mapped_column(ForeignKey("runs.id"))
    round_id: Mapped[UUID] = mapped_column(ForeignKey("rounds.id"))
    round_number: Mapped[int]
    client_id: Mapped[str] = mapped_column(ForeignKey("clients.id"))
    attempt: Mapped[int]
    state: Mapped[str]
    reason: Mapped[str | None]
    # Whose problem it was that the worker declined. Null if it did not, or gave none.
    cause: Mapped[str | None]
    # The round whose client state the client had lost when it worked on this.
    lost_round: Mapped[int | None]
    update_digest: Mapped[str | None] = mapped_column(ForeignKey("artifacts.digest"))
    num_examples: Mapped[int | None] = mapped_column(BigInteger)
    progress: Mapped[Json | None]
    # The newest report of the memory and GPU time that the worker's process uses.
    resources: Mapped[Json | None]
    offered_at: Mapped[datetime] = mapped_column(server_default=func.now())
    leased_at: Mapped[datetime | None]
    lease_expires_at: Mapped[datetime | None]
    closed_at: Mapped[datetime | None]


class SecureRound(Base):
    """The protocol of a secure round. The messages of its members are deleted once the round is closed."""

    __tablename__ = "secure_rounds"
    __table_args__ = (
        CheckConstraint(
            "phase IN ('keys', 'shares', 'vectors', 'confirmations', 'reveals', 'done', 'failed')", name="phase_known"
        ),
    )

    round_id: Mapped[UUID] = mapped_column(ForeignKey("rounds.id"), primary_key=True)
    phase: Mapped[str]
    # Until when the phase waits for its last messages.
    deadline: Mapped[datetime]
    num_words: Mapped[int] = mapped_column(BigInteger)
    # The cohort with its identity keys, thresholds, and, at the end, whose masks were removed.
    facts: Mapped[Json]


class SecureMember(Base):
    """The messages of one client in a secure round, as they arrived. Its list of a phase is frozen at the phase's end:
    nothing is added afterwards."""

    __tablename__ = "secure_members"

    round_id: Mapped[UUID] = mapped_column(ForeignKey("secure_rounds.round_id"), primary_key=True)
    client_id: Mapped[str] = mapped_column(ForeignKey("clients.id"), primary_key=True)
    keys: Mapped[Json | None]
    shares: Mapped[Json | None]
    vectors: Mapped[Json | None]
    confirmations: Mapped[Json | None]
    reveals: Mapped[Json | None]


class DimensionAssignment(Base):
    """A dimension of the embedding that one client of the run owns (SSD). The key makes overlaps impossible."""

    __tablename__ = "dimension_assignments"

    run_id: Mapped[UUID] = mapped_column(ForeignKey("runs.id"), primary_key=True)
    dimension: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    client_id: Mapped[str] = mapped_column(ForeignKey("clients.id"))


class Artifact(Base):
    __tablename__ = "artifacts"

    digest: Mapped[str] = mapped_column(primary_key=True)
    num_bytes: Mapped[int] = mapped_column(BigInteger)
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    # When it was last stored or sent again: an artifact without references is kept for a while from then on.
    touched_at: Mapped[datetime] = mapped_column(server_default=func.now())
    # When its bytes were removed from the store. The row stays while another row refers to it.
    collected_at: Mapped[datetime | None]


class Upload(Base):
    """A record that an artifact was sent for this assignment and was checked against its plan."""

    __tablename__ = "uploads"
    __table_args__ = (Index("ix_uploads_digest", "digest"),)

    assignment_id: Mapped[UUID] = mapped_column(ForeignKey("assignments.id"), primary_key=True)
    digest: Mapped[str] = mapped_column(ForeignKey("artifacts.digest"), primary_key=True)
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())


class PartialUpload(Base):
    """An artifact that a token's owner has begun to send. The size of its file in the store is how much has arrived."""

    __tablename__ = "partial_uploads"
    __table_args__ = (
        Index(
            "uq_partial_uploads_one_a_data_set",
            "token_id",
            "digest",
            unique=True,
            postgresql_where=text("assignment_id IS NULL"),
        ),
    )

    id: Mapped[UUID] = mapped_column(primary_key=True, default=uuid4)
    token_id: Mapped[UUID] = mapped_column(ForeignKey("tokens.id"))
    # One at a time, so that no client can fill the store with unfinished uploads.
    assignment_id: Mapped[UUID | None] = mapped_column(ForeignKey("assignments.id"), unique=True)
    digest: Mapped[str]
    num_bytes: Mapped[int] = mapped_column(BigInteger)
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    is_complete: Mapped[bool] = mapped_column(server_default=text("false"))


class PublicDataset(Base):
    """Images that every client may hold, as one file in the store. The images of a name never change."""

    __tablename__ = "public_datasets"
    __table_args__ = (CheckConstraint("split IN ('train', 'test')", name="split_known"),)

    name: Mapped[str] = mapped_column(primary_key=True)
    project: Mapped[str] = _project()
    digest: Mapped[str] = mapped_column(ForeignKey("artifacts.digest"))
    split: Mapped[str]
    num_images: Mapped[int] = mapped_column(BigInteger)
    channels: Mapped[int]
    image_size: Mapped[int]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())


class EvaluationDataset(Base):
    """Labelled images to evaluate encoders on, as one file in the store. No worker may read it."""

    __tablename__ = "evaluation_datasets"

    name: Mapped[str] = mapped_column(primary_key=True)
    project: Mapped[str] = _project()
    digest: Mapped[str] = mapped_column(ForeignKey("artifacts.digest"))
    num_train: Mapped[int] = mapped_column(BigInteger)
    num_test: Mapped[int] = mapped_column(BigInteger)
    num_classes: Mapped[int]
    channels: Mapped[int]
    image_size: Mapped[int]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())


class RegisteredWeights(Base):
    """Weights that runs may start from, as one file in the store. The weights of a name never change."""

    __tablename__ = "registered_weights"
    __table_args__ = (CheckConstraint("family IN ('fedssl', 'torchvision', 'huggingface')", name="family_known"),)

    name: Mapped[str] = mapped_column(primary_key=True)
    project: Mapped[str] = _project()
    digest: Mapped[str] = mapped_column(ForeignKey("artifacts.digest"))
    family: Mapped[str]
    source_digest: Mapped[str]
    num_tensors: Mapped[int]
    num_parameters: Mapped[int] = mapped_column(BigInteger)
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())


_UNFINISHED = "state IN ('queued', 'running')"


class _JobColumns:
    """The columns that job tables share. `kind` begins the types of a job's events and the names of its locks."""

    kind: ClassVar[str]

    id: Mapped[UUID] = mapped_column(primary_key=True, default=uuid4)
    run_id: Mapped[UUID] = mapped_column(ForeignKey("runs.id"))
    # 0: before the first round.
    round_number: Mapped[int]
    state: Mapped[str]
    reason: Mapped[str | None]
    # How often it was begun, and when it may be begun again.
    num_tries: Mapped[int] = mapped_column(server_default=text("0"))
    retry_at: Mapped[datetime | None]
    # How many of the last tries ended their process before they could record an error.
    num_deaths: Mapped[int] = mapped_column(server_default=text("0"))
    # When a worker was last notified of it.
    sent_at: Mapped[datetime | None]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    started_at: Mapped[datetime | None]
    finished_at: Mapped[datetime | None]


class DistillationJob(_JobColumns, Base):
    """A training on the coordinator: on a round's updates (FLESD), or before the first round (FedCA's base model)."""

    __tablename__ = "distillation_jobs"
    __table_args__ = (
        _one_of("state", JobState),
        CheckConstraint("epoch BETWEEN 0 AND num_epochs", name="epoch_in_range"),
        CheckConstraint("checkpoint IS NULL OR state = 'running'", name="checkpoint_while_running"),
        CheckConstraint(f"({_UNFINISHED}) = (finished_at IS NULL)", name="finished_at_its_end"),
        Index("uq_distillation_jobs_one_unfinished", "run_id", unique=True, postgresql_where=text(_UNFINISHED)),
        Index("ix_distillation_jobs_run_id", "run_id", "created_at", "id"),
    )
    kind = "distillation"

    epoch: Mapped[int] = mapped_column(server_default=text("0"))
    num_epochs: Mapped[int]
    loss: Mapped[float | None]
    seconds_per_epoch: Mapped[float | None]
    # Where a killed job resumes; removed when the job has ended.
    checkpoint: Mapped[str | None] = mapped_column(ForeignKey("artifacts.digest"))
    updated_at: Mapped[datetime | None]


class Evaluation(_JobColumns, Base):
    """The evaluation of a round's encoder on a labelled data set."""

    __tablename__ = "evaluations"
    __table_args__ = (
        _one_of("state", JobState),
        CheckConstraint("(state = 'completed') = (results IS NOT NULL)", name="results_when_completed"),
        CheckConstraint(f"({_UNFINISHED}) = (finished_at IS NULL)", name="finished_at_its_end"),
        CheckConstraint("embedding_map IS NULL OR state = 'completed'", name="map_when_completed"),
        UniqueConstraint("run_id", "round_number", "dataset_digest", "config"),
        Index("ix_evaluations_unfinished", "state", "retry_at", postgresql_where=text(_UNFINISHED)),
        Index("ix_evaluations_model", "model"),
    )
    kind = "evaluation"

    model: Mapped[str] = mapped_column(ForeignKey("artifacts.digest"))
    dataset: Mapped[str] = mapped_column(ForeignKey("evaluation_datasets.name"))
    dataset_digest: Mapped[str] = mapped_column(ForeignKey("artifacts.digest"))
    config: Mapped[Json]
    # The current step, and the results so far, from which a killed evaluation resumes.
    progress: Mapped[Json | None]
    # By name; null if not a finite number, because the encoder's training diverged.
    results: Mapped[Json | None]
    # `fedssl.protocol.chance.Chance`; null if an older version evaluated.
    chance: Mapped[Json | None]
    # Method, labels and points, tens of kilobytes: read only when it is asked for.
    embedding_map: Mapped[Json | None] = mapped_column(deferred=True)


Job = DistillationJob | Evaluation


class SiteEvaluation(Base):
    """The evaluation of a round's encoder, or of another site's classifier, by one client, on its own labelled images.

    Nothing waits for it.
    """

    __tablename__ = "site_evaluations"
    __table_args__ = (
        _one_of("state", SiteEvaluationState),
        CheckConstraint("(state = 'completed') = (counts IS NOT NULL)", name="counts_when_completed"),
        CheckConstraint("(state = 'offered') = (ended_at IS NULL)", name="ended_at_its_end"),
        UniqueConstraint("run_id", "round_number", "client_id", "head_of", postgresql_nulls_not_distinct=True),
        Index("ix_site_evaluations_offered", "client_id", "created_at", postgresql_where=text("state = 'offered'")),
        Index("ix_site_evaluations_model", "model"),
    )

    id: Mapped[UUID] = mapped_column(primary_key=True, default=uuid4)
    run_id: Mapped[UUID] = mapped_column(ForeignKey("runs.id"))
    # 0: before the first round.
    round_number: Mapped[int]
    client_id: Mapped[str] = mapped_column(ForeignKey("clients.id"))
    model: Mapped[str] = mapped_column(ForeignKey("artifacts.digest"))
    state: Mapped[str]
    reason: Mapped[str | None]
    # What the site has counted, as it sent it: up to hundreds of kilobytes.
    counts: Mapped[Json | None]
    # The site whose classifier is evaluated. Null: the run's encoder, with classifiers of the client's own.
    head_of: Mapped[str | None] = mapped_column(ForeignKey("clients.id"))
    # The client's own classifier, as it sent it, for the other sites.
    head: Mapped[Json | None]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    ended_at: Mapped[datetime | None]


class Metric(Base):
    __tablename__ = "metrics"
    __table_args__ = (
        UniqueConstraint("run_id", "round_number", "client_id", "name", postgresql_nulls_not_distinct=True),
        Index("ix_metrics_run_id_id", "run_id", "id"),
        Index("ix_metrics_run_id_name_round_number", "run_id", "name", "round_number"),
    )

    id: Mapped[int] = mapped_column(BigInteger, Identity(always=True), primary_key=True)
    run_id: Mapped[UUID] = mapped_column(ForeignKey("runs.id"))
    round_number: Mapped[int]
    client_id: Mapped[str | None] = mapped_column(ForeignKey("clients.id"))
    name: Mapped[str]
    value: Mapped[float]


class LedgerAnchor(Base):
    """A record that entry `seq` of a client's ledger `key` had the hash `head`. Rows are only ever added."""

    __tablename__ = "ledger_anchors"
    __table_args__ = (
        UniqueConstraint("client_id", "key", "seq", "head"),
        CheckConstraint("seq >= 1", name="seq_counts_from_one"),
        Index("ix_ledger_anchors_client_id_id", "client_id", "id"),
    )

    id: Mapped[int] = mapped_column(BigInteger, Identity(always=True), primary_key=True)
    client_id: Mapped[str] = mapped_column(ForeignKey("clients.id"))
    key: Mapped[str]
    seq: Mapped[int] = mapped_column(BigInteger)
    head: Mapped[str]
    # False if it contradicted an earlier anchor. It is kept as evidence.
    is_consistent: Mapped[bool]
    at: Mapped[datetime] = mapped_column(server_default=func.now())


class SigningKey(Base):
    """The coordinator's Ed25519 key, which all of its processes share."""

    __tablename__ = "signing_keys"
    __table_args__ = (CheckConstraint("id = 1", name="only_one"),)

    id: Mapped[int] = mapped_column(SmallInteger, primary_key=True, autoincrement=False)
    private_key: Mapped[str]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())


class Event(Base):
    __tablename__ = "events"
    __table_args__ = (Index("ix_events_run_id_id", "run_id", "id"),)

    id: Mapped[int] = mapped_column(BigInteger, Identity(always=True), primary_key=True)
    at: Mapped[datetime] = mapped_column(server_default=func.now())
    kind: Mapped[str]
    # Without foreign keys, because there are also events about runs and clients that never existed.
    run_id: Mapped[UUID | None]
    round_number: Mapped[int | None]
    client_id: Mapped[str | None]
    message: Mapped[str]
    data: Mapped[Json] = mapped_column(server_default=text("'{}'::jsonb"))


class NotificationDestination(Base):
    """An address that is notified of events. A webhook's secret is not stored: it is derived from the signing key."""

    __tablename__ = "notification_destinations"
    __table_args__ = (_one_of("kind", DestinationKind),)

    id: Mapped[UUID] = mapped_column(primary_key=True, default=uuid4)
    # The project of whose events it is notified, or null for all events.
    project: Mapped[str | None] = mapped_column(ForeignKey("projects.name"))
    kind: Mapped[str]
    target: Mapped[str]
    label: Mapped[str]
    topics: Mapped[list[str]] = mapped_column(ARRAY(Text))
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())


class NotificationDelivery(Base):
    """A notification for one destination, written in the transaction of its event: it exists if the event does."""

    __tablename__ = "notification_deliveries"
    __table_args__ = (
        _one_of("state", DeliveryState),
        CheckConstraint("(state = 'pending') = (ended_at IS NULL)", name="ended_at_its_end"),
        # One per round and kind, for events that each client of a large cohort may cause.
        UniqueConstraint("destination_id", "once_per"),
        Index("ix_notification_deliveries_due", "next_try_at", postgresql_where=text("state = 'pending'")),
        Index("ix_notification_deliveries_newest", "destination_id", "created_at", "id"),
    )

    id: Mapped[UUID] = mapped_column(primary_key=True, default=uuid4)
    destination_id: Mapped[UUID] = mapped_column(ForeignKey("notification_destinations.id", ondelete="CASCADE"))
    topic: Mapped[str]
    payload: Mapped[Json]
    once_per: Mapped[str | None]
    state: Mapped[str]
    num_tries: Mapped[int] = mapped_column(server_default=text("0"))
    next_try_at: Mapped[datetime] = mapped_column(server_default=func.now())
    # Why the last attempt failed.
    error: Mapped[str | None]
    # Increases within a transaction, so that its deliveries keep the order of its events.
    created_at: Mapped[datetime] = mapped_column(server_default=func.clock_timestamp())
    ended_at: Mapped[datetime | None]
