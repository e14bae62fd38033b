-- The tables of schema version 3, as SQLite and (with DOUBLE PRECISION for DOUBLE) PostgreSQL had them.
CREATE TABLE schema_version (
    version INTEGER NOT NULL
);
CREATE TABLE counter (
    name VARCHAR NOT NULL,
    value BIGINT NOT NULL,
    PRIMARY KEY (name)
);
CREATE TABLE model (
    name VARCHAR NOT NULL,
    profile TEXT NOT NULL,
    updated_at DOUBLE NOT NULL,
    PRIMARY KEY (name)
);
CREATE TABLE batch (
    id VARCHAR NOT NULL,
    name VARCHAR,
    file_hash VARCHAR NOT NULL,
    status VARCHAR NOT NULL,
    endpoint VARCHAR,
    parameters TEXT NOT NULL,
    priority INTEGER NOT NULL,
    num_invalid_lines INTEGER NOT NULL,
    submission VARCHAR NOT NULL,
    created_at DOUBLE NOT NULL,
    in_progress_at DOUBLE,
    finalizing_at DOUBLE,
    completed_at DOUBLE,
    failed_at DOUBLE,
    expires_at DOUBLE,
    expired_at DOUBLE,
    cancelling_at DOUBLE,
    cancelled_at DOUBLE,
    PRIMARY KEY (id),
    UNIQUE (name)
);
CREATE INDEX batch_by_status ON batch (status, in_progress_at);
CREATE TABLE job (
    id VARCHAR NOT NULL,
    batch_id VARCHAR NOT NULL,
    line INTEGER NOT NULL,
    custom_id VARCHAR NOT NULL,
    model VARCHAR NOT NULL,
    url VARCHAR NOT NULL,
    state VARCHAR NOT NULL,
    attempt INTEGER NOT NULL,
    deliveries INTEGER NOT NULL,
    request_bytes INTEGER NOT NULL,
    queued_at DOUBLE,
    claimed_at DOUBLE,
    recorded_at DOUBLE,
    expires_at DOUBLE,
    stop_reason VARCHAR,
    stop_at DOUBLE,
    request_key VARCHAR,
    profile_key VARCHAR,
    reused_from VARCHAR,
    head VARCHAR,
    finish_reason VARCHAR,
    error_type VARCHAR,
    prompt_tokens INTEGER,
    completion_tokens INTEGER,
    started_at DOUBLE,
    finished_at DOUBLE,
    ttft_s DOUBLE,
    decode_tps DOUBLE,
    e2e_tps DOUBLE,
    rounds INTEGER,
    tokens_per_round DOUBLE,
    drafted INTEGER,
    accepted INTEGER,
    acceptance DOUBLE,
    cached_tokens INTEGER,
    wire_bytes_up BIGINT,
    wire_bytes_down BIGINT,
    draft_s DOUBLE,
    head_s DOUBLE,
    link_s DOUBLE,
    tail_s DOUBLE,
    wire_dtype VARCHAR,
    queue_s DOUBLE,
    duplicate_records INTEGER NOT NULL,
    stale_records INTEGER NOT NULL,
    error_message TEXT,
    request TEXT NOT NULL,
    text TEXT,
    token_ids TEXT,
    PRIMARY KEY (id),
    UNIQUE (batch_id, line),
    UNIQUE (batch_id, custom_id),
    FOREIGN KEY(batch_id) REFERENCES batch (id)
);
CREATE INDEX job_stopping ON job (stop_at) WHERE stop_reason IS NOT NULL AND state IN ('queued', 'running');
CREATE INDEX job_expiring ON job (expires_at) WHERE expires_at IS NOT NULL AND stop_reason IS NULL AND state IN ('queued', 'running', 'waiting');
CREATE INDEX job_in_flight ON job (model, batch_id) WHERE state IN ('queued', 'running');
CREATE INDEX job_reusable ON job (request_key) WHERE request_key IS NOT NULL AND reused_from IS NULL AND state = 'completed';
CREATE INDEX job_by_state ON job (batch_id, state, completion_tokens, reused_from);
CREATE INDEX job_waiting ON job (batch_id, model, line) WHERE state = 'waiting';
