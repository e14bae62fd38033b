# The image of the public host: command line, `init-server`, bookkeeper, Flower. No torch.
FROM python:3.12-slim

WORKDIR /app
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY examples examples
COPY cli cli
COPY relay relay
COPY storage storage
COPY tasks tasks
COPY workers workers
RUN pip install --no-cache-dir -c constraints.txt '.[server]' \
    && useradd --create-home --uid 1000 shardq \
    && install -d -o shardq -g shardq -m 700 /data

USER shardq
ENV SHARDQ_DATA_DIR=/data PYTHONUNBUFFERED=1
VOLUME /data
CMD ["shardq", "--help"]
